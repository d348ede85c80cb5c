"""Linux interfaces: processes, cgroups, hardware inventory."""
