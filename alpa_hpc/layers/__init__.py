"""A traced step cut into layers, differentiated one by one (paper, section 5.1)."""
