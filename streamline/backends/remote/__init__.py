"""Workers on other machines: agents there start host processes, whose links are TCP connections to the trainer."""
