"""laconic beside torch's DistributedDataParallel."""

import os

# Before torch is loaded, because torch.set_num_threads() speaks for the calling thread alone: in threads that play
# ranks, a product would be rounded by how many threads it was shared among.
os.environ.setdefault("OMP_NUM_THREADS", "1")
