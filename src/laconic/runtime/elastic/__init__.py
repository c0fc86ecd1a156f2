"""Sessions that continue when ranks die, join and leave."""
