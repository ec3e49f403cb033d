//! Who tells the index what: engines over `ZeroMQ`, workers of kvik over HTTP.
