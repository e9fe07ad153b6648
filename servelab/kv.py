"""What the KV exercises and their checks share."""


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than were asked for; nothing was taken."""
