"""Text from files and data sets to prepared folders of token ids."""
