"""What requests see: P99 of first and further tokens, out of the gateways' metrics."""
