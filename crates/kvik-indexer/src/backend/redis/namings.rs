//! Which books a model has on a server, so that a gateway that starts finds them before any event.

use redis::{FromRedisValue as _, Value};
use xxhash_rust::xxh3::xxh3_64;

use super::client::misunderstood;
use super::{RedisBackend, RedisClient, RedisOptions};
use crate::error::Result;

impl RedisBackend {
    /// The namings of all books of a model that were ever [announced](Self::announce).
    ///
    /// # Errors
    /// If the server is away.
    pub async fn namings(client: &RedisClient, options: &RedisOptions, model: &str) -> Result<Vec<String>> {
        let operation = "list the books of a model";
        let key = list_key(options, model);
        let mut command = redis::cmd("SMEMBERS");
        command.arg(&key);
        let answer: Value = client.command(operation, options.write_timeout, &command, &key).await?;
        let names = Vec::<Vec<u8>>::from_redis_value(answer).map_err(|_| misunderstood(operation))?;
        Ok(names.into_iter().filter_map(|name| String::from_utf8(name).ok()).collect())
    }

    /// Notes that a model has a book with this naming; once is enough, again does no harm.
    ///
    /// # Errors
    /// If the server is away.
    pub async fn announce(
        client: &RedisClient,
        options: &RedisOptions,
        model: &str,
        naming: &str,
    ) -> Result<()> {
        let key = list_key(options, model);
        let mut command = redis::cmd("SADD");
        command.arg(&key).arg(naming);
        client.command("note a book", options.write_timeout, &command, &key).await.map(drop)
    }
}

fn list_key(options: &RedisOptions, model: &str) -> Vec<u8> {
    format!("{}:{{{:016x}}}:books", options.key_prefix, xxh3_64(model.as_bytes())).into_bytes()
}
