"""JaxprEqn -> OpRule: which loops of an operator a mesh axis may split, a rule a kind of operator."""
