"""The orders in which an epoch may traverse the data set; elastic.DataLoader takes one as its `order`."""

from farandole.data.orders.bucketed import Bucketed
from farandole.data.orders.order import Lookup, Order
from farandole.data.orders.shard_local import ShardLocal
from farandole.data.orders.simple import Sequential, Shuffled
from farandole.data.orders.stratified import Stratified
from farandole.data.orders.weighted import Weighted

__all__ = ["Bucketed", "Lookup", "Order", "Sequential", "ShardLocal", "Shuffled", "Stratified", "Weighted"]
