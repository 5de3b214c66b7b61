"""A user's train step as flat jaxprs, in parts."""
