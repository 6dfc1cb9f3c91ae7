"""What operators watch: request figures that the gateway takes, engine figures that lie in the ring's header."""
