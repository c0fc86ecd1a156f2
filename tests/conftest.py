"""Settings every test shares."""

from __future__ import annotations

import hypothesis
import torch

# The same examples on every machine and in every run: a red build means a change, not bad luck.
hypothesis.settings.register_profile(
    "laconic",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("laconic")

# Two cores are shared by threads and processes that play ranks.
torch.set_num_threads(1)
