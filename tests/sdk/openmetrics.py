"""Reads a page of metrics from standard input as Python's own client library does, and prints what it found.

A family that the parser refuses ends the program with its complaint.
"""

import sys

from prometheus_client.openmetrics.parser import text_string_to_metric_families

families = list(text_string_to_metric_families(sys.stdin.read()))
for family in families:
    assert family.documentation.endswith("."), family.name
    for sample in family.samples:
        assert sample.name.startswith(family.name), (family.name, sample.name)
print(sum(len(family.samples) for family in families), "samples of", len(families), "families")
