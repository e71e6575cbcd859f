"""Messages from one rank to another, without the other ranks; and collectives of some ranks made of them."""
