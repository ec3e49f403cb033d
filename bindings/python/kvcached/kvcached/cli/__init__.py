"""What `kvctl` and `kvtop` of kvcached are made of."""
