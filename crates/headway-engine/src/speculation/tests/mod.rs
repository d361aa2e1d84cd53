//! Tests of speculation: drafts against a plain search, and verified answers against plain decoding, token for token and
//! by their distribution.

mod lookup;
mod verify;
