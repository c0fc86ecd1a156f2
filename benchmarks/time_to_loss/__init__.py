"""How long each strategy trains until it has the loss that torch DDP ends with."""
