"""Other libraries' training loops with fzero below. Each module needs its library, which fzero itself does not."""
