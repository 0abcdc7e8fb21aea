"""The HTTP faces, a file each, and what they share: fields, checks, bodies, replies, options."""
