"""Jobs in the background: started, listed, shown, ended."""
