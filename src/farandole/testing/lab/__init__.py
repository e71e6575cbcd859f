"""Simulated hosts on one Linux machine, as namespaces, and faults of hosts and networks. For tests that need several.

with Lab(hosts=3) as lab:
    process = lab.hosts[0].start([sys.executable, "worker.py"])
    lab.network.cut(lab.hosts[0])
"""

from farandole.testing.lab.host import Host
from farandole.testing.lab.lab import Lab, why_not
from farandole.testing.lab.network import Network
from farandole.testing.lab.tools import LabError

__all__ = ["Host", "Lab", "LabError", "Network", "why_not"]
