"""vLLM's engine service as smg-grpc-proto defines it, so that gateways of that family can route to Blink unchanged."""
