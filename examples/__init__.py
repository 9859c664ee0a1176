"""Short programs that call the library as an application does."""
