"""Ways into other people's libraries. Importing one imports no such library; asking it for something does."""
