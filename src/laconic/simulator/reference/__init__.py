"""Published measurements that the simulator is compared with."""
