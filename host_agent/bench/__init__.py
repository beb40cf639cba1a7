"""The benchmark: operations of a pod beside this machine's own limits, and the report of what was measured.

`entresol-agent bench` runs it on any pod that is up, `entresol-emu bench` on a pod of each emulated fabric. What is
measured is in `cases`, what it is held against in `limits`; `environment`, `tables` and `plots` know nothing of either
and serve other reports too. Never part of the data path.
"""
