// Parses the URL of a setting. The error of `new URL` would hold the whole URL, and so the password.
export function parsed(setting, url) {
  try {
    return new URL(url);
  } catch {
    throw new TypeError(`${setting} is not a valid URL`);
  }
}
