"""The orders in which an epoch may traverse the data set; elastic.DataLoader takes one as its `order`."""

from farandole.data.orders.grouped import Bucketed, ShardLocal, Stratified, Weighted
from farandole.data.orders.order import Lookup, Order, Sequential, Shuffled

__all__ = ["Bucketed", "Lookup", "Order", "Sequential", "ShardLocal", "Shuffled", "Stratified", "Weighted"]
