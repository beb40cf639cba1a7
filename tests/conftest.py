"""For all tests: Hypothesis judges what the code does, not how busy the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("entresol", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("entresol")
