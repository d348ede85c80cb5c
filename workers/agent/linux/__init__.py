"""Linux interfaces: processes, cgroups, malloc, hardware inventory."""
