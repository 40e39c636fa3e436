//! Publishes a like. docs/clients.md shows this program.

use tallyd_client::{Client, Settings, Target, TargetId, UserId};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut settings = Settings::default();
    settings.amqp.url = "amqp://tallyd_api:secret@rabbitmq/%2f".into();
    settings.mysql.url = "mysql://tallyd_api:secret@mysql/tally".into();
    settings.redis.url = "redis://tallyd_api:secret@redis".into();
    let client = Client::new(&settings)?;
    let video = Target { kind: client.kind("video").await?, id: TargetId(42) };
    client.like(video, UserId(7)).await?;
    Ok(())
}
