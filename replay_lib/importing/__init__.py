"""Debug dumps of other trainers (slime, verl) as snapshots that can be looked at."""
