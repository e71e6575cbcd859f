"""Messages from one rank to another, which nobody else takes part in; and collectives of some ranks made of them."""
