"""Records from elsewhere and to elsewhere: tables, other databases, remote folders."""
