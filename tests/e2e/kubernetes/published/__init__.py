"""The published CRDs of the systems that Holdfast's gangs and queues speak to."""
