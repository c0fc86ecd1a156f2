"""Throughputs with one exchange after the whole backward pass, which the survey's other methods are predicted from.

Samples per second of all GPUs together, mean of five launches, for 4, 8, 16 and 32 of them. Cluster: 8 hosts with 4
RTX 2080 Ti each, PCIe only; 10 Gbit/s Ethernet, 100 Gbit/s InfiniBand with RDMA, and TCP/IP over the same InfiniBand
("100GbE"). None: a cell for which networks were almost surely mixed up in the measurement.

Source: repository of "A Quantitative Survey of Communication Optimizations in Distributed Deep Learning"
(HKBU-HPML/ddl-benchmarks, results of 2020-05-29).
"""

from __future__ import annotations

GPUS = (4, 8, 16, 32)
MODELS = {"ResNet-50": "resnet50", "BERT-Base": "bert-base", "BERT-Large": "bert-large"}
"""The survey's names, and those of the workloads."""
NETWORKS = ("10GbE", "100GbE", "100GbIB")

THROUGHPUT: dict[tuple[str, str, str], tuple[float | None, ...]] = {
    ("ResNet-50", "10GbE", "BSP-A2A"): (925.02, 1282.28, 2485.12, 4920.82),
    ("ResNet-50", "10GbE", "BSP-PS"): (866.3, 1194.44, 2361.27, 4376.58),
    ("ResNet-50", "100GbE", "BSP-A2A"): (926, 1601.36, 3087.16, 5744.76),
    ("ResNet-50", "100GbE", "BSP-PS"): (864.14, None, None, None),
    ("ResNet-50", "100GbIB", "BSP-A2A"): (920.28, 1821.2, 3602.9, 7126.52),
    ("ResNet-50", "100GbIB", "BSP-PS"): (862.96, 1694.9, 3353.22, 6587.63),
    ("BERT-Base", "10GbE", "BSP-A2A"): (555.52, 518.94, 984.88, 1926.64),
    ("BERT-Base", "10GbE", "BSP-PS"): (559.26, 505.438, 1022.38, 2028.02),
    ("BERT-Base", "100GbE", "BSP-A2A"): (555.36, 804.62, 1504.62, 2815.72),
    ("BERT-Base", "100GbE", "BSP-PS"): (557.18, 748.78, 1688.95, 3583.77),
    ("BERT-Base", "100GbIB", "BSP-A2A"): (555.7, 1082.42, 2112.96, 4184.38),
    ("BERT-Base", "100GbIB", "BSP-PS"): (557.92, 1040.01, 2077.68, 4162.2),
    ("BERT-Large", "10GbE", "BSP-A2A"): (53.04, 28.96, 54.3, 105.1),
    ("BERT-Large", "10GbE", "BSP-PS"): (51.42, 28.367, 59.22, 117.957),
    ("BERT-Large", "100GbE", "BSP-A2A"): (52.9, 55.8, 103.34, 187),
    ("BERT-Large", "100GbE", "BSP-PS"): (51.46, None, None, None),
    ("BERT-Large", "100GbIB", "BSP-A2A"): (53.08, 99.18, 191.64, 375.22),
    ("BERT-Large", "100GbIB", "BSP-PS"): (51.38, 88.51, 168.215, 355.69),
}
"""(model, network, method) -> samples per second, for each of GPUS."""
