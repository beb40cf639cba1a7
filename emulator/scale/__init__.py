"""How the pod behaves as it grows: many region workers and many agents on one machine, and what their work costs.

`run` measures (`entresol-emu bench-scale`), `cost_model` says what a larger machine would need for the same work
(`entresol-emu cost-model`).
"""
