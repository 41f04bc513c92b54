"""The end of the whole job when one of its ranks ends in failure."""
