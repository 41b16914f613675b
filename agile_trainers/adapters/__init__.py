"""Several adapters on one frozen base: the policy, its reference, a critic with a value head."""
