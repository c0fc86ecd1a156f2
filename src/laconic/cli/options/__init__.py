"""The options of each command, one file per command: what `laconic COMMAND --help` needs, without torch."""
