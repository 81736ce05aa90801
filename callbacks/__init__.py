"""Lightning callbacks: glue at hook times, each removable."""
