"""The communicators of ChainerMN."""
