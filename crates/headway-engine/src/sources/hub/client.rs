//! The hub's protocol over `ureq`: listing a repository, asking about a file, opening a transfer.
//!
//! Every phase of every request is bounded in time. Not for writing files: see `download`.

use std::fs;
use std::time::Duration;

use hf_hub::Repo;
use hf_hub::api::RepoInfo;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Timeout};

use crate::sources::error::HubError;
use crate::sources::options::{AccessToken, FetchOptions};
use crate::sources::spec::HubId;

/// Redirects that stay on the hub (a renamed repository) before a file's description is given up.
const MAX_HOPS: usize = 5;

/// What the hub says about a file before it is downloaded.
#[derive(Debug, Clone)]
pub(super) struct FileInfo {
    /// The blob's name: SHA-256 for large files, a git hash for small ones.
    pub etag: String,
    /// The commit that the revision stands for.
    pub commit: String,
    /// Size in bytes.
    pub size: u64,
}

/// A connection to one repository.
#[derive(Debug)]
pub(super) struct Client {
    agent: Agent,
    id: HubId,
    endpoint: String,
    token: Option<AccessToken>,
    limit: Duration,
}

impl Client {
    pub(super) fn new(id: &HubId, opts: &FetchOptions) -> Result<Self, HubError> {
        let limit = Some(opts.hub_timeout);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent(concat!("headway/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(limit)
            .timeout_connect(limit)
            .timeout_send_request(limit)
            .timeout_recv_response(limit)
            .timeout_per_read(limit);
        if let Some(path) = &opts.ca_file {
            let pem = fs::read(path).map_err(|e| HubError::io("read", path, e))?;
            let roots: Vec<Certificate<'static>> = parse_pem(&pem)
                .filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                })
                .collect();
            config =
                config.tls_config(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots)).build());
        }
        Ok(Self {
            agent: config.build().into(),
            id: id.clone(),
            endpoint: opts.hub_endpoint.clone(),
            token: opts.hub_token.clone(),
            limit: opts.hub_timeout,
        })
    }

    pub(super) fn id(&self) -> &HubId {
        &self.id
    }

    /// The repository's file names; `None` from a server that has no such list.
    pub(super) fn list(&self) -> Result<Option<Vec<String>>, HubError> {
        let url = format!("{}/api/{}", self.endpoint, self.repo().api_url());
        let mut response = self.send(&url, "GET", None, true)?;
        let status = response.status().as_u16();
        let known_error = response.headers().contains_key("x-error-code");
        if matches!(status, 404 | 405 | 501) && !known_error {
            return Ok(None);
        }
        self.check(&url, &response)?;
        let info: RepoInfo = response.body_mut().read_json().map_err(|e| match e {
            ureq::Error::Json(e) => self.protocol(&url, format!("the list of files is malformed ({e})")),
            other => self.failure(&url, other),
        })?;
        Ok(Some(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect()))
    }

    /// What the hub says about a file.
    pub(super) fn info(&self, file: &str) -> Result<FileInfo, HubError> {
        let mut url = self.file_url(file);
        let mut method = "HEAD";
        let mut told = HeaderMap::new();
        for _ in 0..=MAX_HOPS {
            let range = (method == "GET").then_some("bytes=0-0");
            let response = self.send(&url, method, range, false)?;
            if matches!(response.status().as_u16(), 405 | 501) && method == "HEAD" {
                method = "GET";
                continue;
            }
            for name in ["x-linked-etag", "x-linked-size", "x-repo-commit"] {
                if let (Some(value), false) = (response.headers().get(name), told.contains_key(name)) {
                    told.insert(name, value.clone());
                }
            }
            if let Some(next) = self.hop(&response) {
                url = next;
                continue;
            }
            if !response.status().is_redirection() {
                self.check(&url, &response)?;
            }
            return self.describe(file, &url, &told, &response);
        }
        Err(self.protocol(&url, "it redirects in a circle".to_owned()))
    }

    /// Opens a file's transfer from byte `from` on.
    pub(super) fn open(&self, file: &str, from: u64) -> Result<Response<Body>, HubError> {
        let url = self.file_url(file);
        let range = (from > 0).then(|| format!("bytes={from}-"));
        let response = self.send(&url, "GET", range.as_deref(), true)?;
        self.check(&url, &response)?;
        Ok(response)
    }

    pub(super) fn file_url(&self, file: &str) -> String {
        let repo = self.repo();
        format!("{}/{}/resolve/{}/{file}", self.endpoint, repo.url(), repo.url_revision())
    }

    pub(super) fn protocol(&self, url: &str, because: String) -> HubError {
        HubError::Protocol { url: url.to_owned(), because }
    }

    /// Translates a transport error.
    pub(super) fn failure(&self, url: &str, error: ureq::Error) -> HubError {
        let url = url.to_owned();
        match error {
            ureq::Error::Timeout(which) => HubError::TimedOut { url, phase: phase(which), limit: self.limit },
            ureq::Error::HostNotFound => {
                HubError::Unreachable { url, because: "the host name is unknown (no network?)".to_owned() }
            }
            ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::TimedOut => {
                HubError::TimedOut { url, phase: "while connecting or reading", limit: self.limit }
            }
            ureq::Error::Io(e) if e.to_string().contains("lookup") => {
                HubError::Unreachable { url, because: format!("{e} (no network?)") }
            }
            ureq::Error::Io(e) => HubError::Unreachable { url, because: e.to_string() },
            other => HubError::Unreachable { url, because: other.to_string() },
        }
    }

    fn repo(&self) -> Repo {
        super::repo(&self.id)
    }

    fn send(
        &self,
        url: &str,
        method: &str,
        range: Option<&str>,
        follow: bool,
    ) -> Result<Response<Body>, HubError> {
        let request = if method == "HEAD" { self.agent.head(url) } else { self.agent.get(url) };
        let mut request = request.config().max_redirects(if follow { 10 } else { 0 }).build();
        // Compressed transfers have other sizes and ranges than the file.
        request = request.header("Accept-Encoding", "identity");
        if let Some(AccessToken(token)) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(range) = range {
            request = request.header("Range", range);
        }
        request.call().map_err(|e| self.failure(url, e))
    }

    /// The next address if the answer is a redirect that stays on the hub. One that leads away goes to the storage
    /// behind it, whose own headers say nothing about the repository.
    fn hop(&self, response: &Response<Body>) -> Option<String> {
        if !response.status().is_redirection() {
            return None;
        }
        let location = header(response.headers(), "location")?;
        if location.starts_with('/') && !location.starts_with("//") {
            return Some(format!("{}{location}", origin(&self.endpoint)));
        }
        let stays = location.starts_with(&format!("{}/", self.endpoint));
        (stays && !response.headers().contains_key("x-linked-etag")).then_some(location)
    }

    /// Puts a description together: `told` is what the answers on the way said, `response` the last of them.
    fn describe(
        &self,
        file: &str,
        url: &str,
        told: &HeaderMap,
        response: &Response<Body>,
    ) -> Result<FileInfo, HubError> {
        let headers = response.headers();
        let missing = |name: &str| self.protocol(url, format!("{file} comes without the header {name}"));
        let etag = header(told, "x-linked-etag")
            .or_else(|| header(headers, "etag"))
            .ok_or_else(|| missing("etag"))?;
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
        let commit = header(told, "x-repo-commit").ok_or_else(|| missing("x-repo-commit"))?;
        for (name, value) in [("etag", &etag), ("x-repo-commit", &commit)] {
            if !is_file_name(value) {
                return Err(self.protocol(url, format!("{file} has the malformed {name} '{value}'")));
            }
        }
        let size = match header(told, "x-linked-size") {
            Some(size) => size,
            None if response.status().is_redirection() => self.stored_size(file)?,
            None => range_total(headers)
                .or_else(|| header(headers, "content-length"))
                .ok_or_else(|| missing("content-length"))?,
        };
        let size = size
            .parse()
            .map_err(|_| self.protocol(url, format!("{file} has the malformed size '{size}'")))?;
        Ok(FileInfo { etag, commit, size })
    }

    /// The size that the storage behind the hub tells.
    fn stored_size(&self, file: &str) -> Result<String, HubError> {
        let url = self.file_url(file);
        let response = self.send(&url, "GET", Some("bytes=0-0"), true)?;
        self.check(&url, &response)?;
        range_total(response.headers())
            .ok_or_else(|| self.protocol(&url, format!("{file} comes without the header content-range")))
    }

    fn check(&self, url: &str, response: &Response<Body>) -> Result<(), HubError> {
        let status = response.status().as_u16();
        let code = header(response.headers(), "x-error-code").unwrap_or_default();
        match status {
            200..=299 => Ok(()),
            401 | 403 => Err(HubError::Refused {
                status,
                repo: self.id.to_string(),
                page: format!("{}/{}", self.endpoint, self.id.repo),
            }),
            404 => Err(HubError::NotFound { what: not_found(&code, &self.id, url) }),
            _ => Err(HubError::Status { status, url: url.to_owned() }),
        }
    }
}

fn not_found(code: &str, id: &HubId, url: &str) -> String {
    match code {
        "RepoNotFound" => format!("repository {}", id.repo),
        "RevisionNotFound" => format!("revision '{}' of {}", id.revision, id.repo),
        _ => url.to_owned(),
    }
}

fn phase(which: Timeout) -> &'static str {
    match which {
        Timeout::Resolve => "looking up the host name",
        Timeout::Connect => "connecting",
        Timeout::SendRequest | Timeout::RecvResponse => "waiting for the answer",
        _ => "while reading",
    }
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// The whole file's size in a `Content-Range`.
fn range_total(headers: &HeaderMap) -> Option<String> {
    Some(header(headers, "content-range")?.rsplit_once('/')?.1.to_owned())
}

/// Whether a value from outside may become the name of a file.
fn is_file_name(value: &str) -> bool {
    !value.is_empty()
        && value.len() <= 128
        && !value.starts_with('.')
        && value.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// Scheme and host of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    let end = url.get(host..).and_then(|rest| rest.find('/')).map_or(url.len(), |at| host + at);
    url.get(..end).unwrap_or(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins() {
        assert_eq!(origin("http://127.0.0.1:80/hub/x"), "http://127.0.0.1:80");
        assert_eq!(origin("https://huggingface.co"), "https://huggingface.co");
    }
}
