"""The verbs. Each module registers its commands; heavy imports happen inside them."""
