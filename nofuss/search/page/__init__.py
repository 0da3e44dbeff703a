"""The page of `nofuss serve`: its server, the guard at its door, its requests and files."""
