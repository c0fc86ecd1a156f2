"""Does it still learn? Every method beside no compression, at equal steps; see __main__ for what is measured."""
