"""A Kubernetes for the tests: a control plane, up to three nodes, and the faults to put to them.

Everything that it makes is named after one run and removed with it: processes, network devices,
cgroups, mounts and files. It must not touch anything else of the machine.
"""
