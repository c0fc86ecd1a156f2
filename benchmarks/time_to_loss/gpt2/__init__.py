"""GPT-2 (124 M) on one GPU that is shared by several ranks behind slow links: time to the loss of torch DDP."""
