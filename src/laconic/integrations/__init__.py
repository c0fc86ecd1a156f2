"""laconic inside training frameworks: one file for each, behind an extra of the same name.

`import laconic` imports none of them.
"""
