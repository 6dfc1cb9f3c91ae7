"""From the cluster's objects to what decisions are made of."""
