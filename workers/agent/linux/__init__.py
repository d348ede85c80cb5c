"""Linux interfaces: processes, hardware inventory."""
