"""A Kubernetes cluster for the tests: a control plane, up to three nodes, and fault injection.

Everything that a run creates carries its name and is removed with it: processes, network devices,
cgroups, mounts and files. The rest of the machine is not changed.
"""
