"""The apps on top of the library. The library imports none of them."""
